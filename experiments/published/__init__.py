"""Published runs as jobs, predicted with frozen hardware and software files, and how far off the predictions are.

    python -m experiments.published [--sets a,b] [--control NAME] [--rows] [--json] [--write]

`data/` holds compact tables of the published figures, a source beside each. `sets` turns a line into the job that was
run, and data/sets.toml says what had to be assumed; no constant here is fitted, and none belongs to a single row. A
line that no job can express is listed with the reason; a line whose prediction fails is listed as a failure.
"""
