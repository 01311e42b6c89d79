"""Sizes of PyTorch's CUDA caching allocator, bytes (c10/core/AllocatorConfig.h)."""

BLOCK = 512
"""Every request is a multiple of this."""

SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
"""Largest request of the small pool; its segments, and its pages with expandable segments."""

MIDDLE, MIDDLE_SEGMENT = 10 * 2**20, 20 * 2**20
"""Large requests below the first share segments of the second, which is also the large pool's page."""

LARGE_GRAIN = 2 * 2**20
"""Other segments are a multiple of this."""
