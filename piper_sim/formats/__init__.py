"""Plans, traces and tables in other tools' formats."""
