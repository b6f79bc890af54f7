"""The files that each rank writes for its job's report, while it trains."""
