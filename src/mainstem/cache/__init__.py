"""The cache over the tree: keys, namespaces and identities, owners and their quotas, policies, leases."""
