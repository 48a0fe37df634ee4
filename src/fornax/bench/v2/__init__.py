"""Load on a V2 model server, over HTTP or gRPC: `fornax bench host`."""
