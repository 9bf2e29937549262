"""The certificate: baseline and incumbent trained afresh and compared on the sealed set."""
