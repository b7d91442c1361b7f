"""Building blocks of all maintenance: live sets, tasks, selection of versions."""
