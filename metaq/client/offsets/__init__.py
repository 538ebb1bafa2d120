"""Where reading goes on: stores of offsets, commits and offset reset."""
