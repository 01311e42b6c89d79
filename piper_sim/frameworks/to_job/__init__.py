"""What launches state, as jobs: the model, ranks, how a step is done; in order of a walk, `launch`."""
