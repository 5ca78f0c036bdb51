"""What can be hooked: sets of hooks, their signatures, and how a call's arguments are laid out."""
