"""From a get to a handled message: fetchers, fetch buffer and handlers."""
