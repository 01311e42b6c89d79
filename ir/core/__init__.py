"""Words everything else is written in: errors, op text, work, mesh axes, filters, orders, limits."""
