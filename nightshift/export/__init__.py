"""What is carried away of a campaign: tables, other programs' files, a bundle, the model."""
