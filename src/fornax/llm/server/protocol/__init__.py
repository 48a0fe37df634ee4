"""The bodies of requests and answers, one file per endpoint."""
