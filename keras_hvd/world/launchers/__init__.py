"""The launchers besides khvdrun whose ranks meet their own way, one file each."""
