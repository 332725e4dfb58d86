"""From evidence to a better state: instructions and playbooks."""
