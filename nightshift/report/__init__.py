"""The morning: one page, its picture and its Markdown, every number from the ledger."""
