"""Where steps come from besides functions of the user: one file per kind of target."""
