"""The ACE loop over playbooks, part by part; its front door is `PlaybookOptimizer`."""
