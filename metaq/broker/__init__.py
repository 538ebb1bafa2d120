"""The broker: sessions, dispatch, handlers, registration, administration."""
