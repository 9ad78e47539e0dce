"""From a group's rewards to its rollouts' advantages. Pure."""
