"""Past runs against their predictions: residuals by class, and a correction that is suggested, never slipped in.

A job names a table, `[history] file = "past_runs.csv"`: one past run per row. Columns are keys of the job, as
`parallel.pp` or `schedule.name`, for what differs from it (an empty cell: nothing does), and beside them `iteration_s`,
seconds of a step or `oom`; `peak_allocated_GiB` of the fullest rank; `class` and `note`, the user's own words.

| module | from what to what |
|---|---|
| `table` | the file to checked rows; a bad one is refused by line and column |
| `backtest` | each row to a job, its prediction and its error |
| `correct` | errors to a factor on seconds, where leaving rows out says that it helps |
| `show` | all of it as JSON and as text; a prediction corrected, its raw numbers beside it |
"""
