"""Records in, verdicts and tables out: pairing, statistics, verdicts, tables. No torch."""
