"""Pure rules from facts to a plan. Standard library and our own records only."""
