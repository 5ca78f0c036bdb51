"""A server of S3 on this machine, and what is in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


class Bucket:
    """A bucket of a server that runs in this process."""

    def __init__(self, endpoint: str, name: str) -> None:
        import boto3

        self.endpoint, self.name = endpoint, name
        self._client: Any = boto3.client("s3", endpoint_url=endpoint)
        self._client.create_bucket(Bucket=name)

    def url(self, key: str = "") -> str:
        """Of an object, or of a folder."""
        return f"s3://{self.name}/{key}"

    def put(self, key: str, content: bytes) -> str:
        """Writes an object; its URL."""
        self._client.put_object(Bucket=self.name, Key=key, Body=content)
        return self.url(key)

    def get(self, key: str) -> bytes:
        """What an object has."""
        return bytes(self._client.get_object(Bucket=self.name, Key=key)["Body"].read())

    def keys(self, prefix: str = "") -> list[str]:
        """The objects whose keys begin so."""
        found = self._client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return [one["Key"] for one in found.get("Contents", [])]


@contextmanager
def s3_server(name: str) -> Iterator[Bucket]:
    """A server with one bucket, where everything in this process and its children finds it."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        with patch.dict(os.environ, environment):
            S3FileSystem.clear_instance_cache()  # those of another server
            yield Bucket(endpoint, name)
    finally:
        S3FileSystem.clear_instance_cache()
        server.stop()
