"""Schedules that are searched for given op times: zb2p, v-half, v-min."""
