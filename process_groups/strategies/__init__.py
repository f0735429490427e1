"""All-reduce algorithms as programs: pure functions that say what each rank sends, receives and combines."""
