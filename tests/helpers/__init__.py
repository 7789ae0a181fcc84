"""Models, problems, twins and processes that tests of several packages share."""
