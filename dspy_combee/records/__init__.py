"""The frozen values that pass between stages, and what every room needs: errors, checks, text as data, secrets."""
