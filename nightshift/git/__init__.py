"""The few git facts and deeds."""
