"""Tools for plugin authors: a generator of plugin skeletons, and explanations and checks of manifests."""
