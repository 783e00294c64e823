"""Names that commands of this folder import, until they move."""

from npattn.cli.flags import refuse_beside_cluster as refuse_beside_cluster
