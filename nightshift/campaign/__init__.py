"""What a campaign has decided and believes: ledger, fold, decision rule."""
