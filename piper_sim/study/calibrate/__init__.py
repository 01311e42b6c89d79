"""Profiles: from measuring a job's ops and messages here, from a user's traces, from nccl-tests, from pair tables."""

from piper_sim.study.calibrate.job import ProfileOptions, ProfileResult, calibrate

__all__ = ["ProfileOptions", "ProfileResult", "calibrate"]
