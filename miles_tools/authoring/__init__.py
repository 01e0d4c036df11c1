"""What plugin authors use: a generator of plugin skeletons, and explanations and checks of manifests."""
