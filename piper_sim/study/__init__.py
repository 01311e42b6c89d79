"""Questions asked of a job: predict, compare, validate, calibrate, backtest."""
