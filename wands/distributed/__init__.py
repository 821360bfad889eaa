"""Who holds which token: index arithmetic, and the rank grid."""
