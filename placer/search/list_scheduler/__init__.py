"""List schedulers: the learned one, of which HEFT is a special case, and Earliest Task First."""
