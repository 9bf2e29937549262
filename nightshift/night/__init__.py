"""The night: propose, train, decide, record, until a stop rule holds."""
