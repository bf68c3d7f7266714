"""Where experience lies and with which credentials, as a Prefect block: named once, used by any recipe."""

import os
from typing import cast

from prefect.blocks.core import Block
from pydantic import Field, SecretStr


class ExperienceStore(Block):
    """A store that recipes name as ``store: block:NAME``; for S3 with the credentials and the endpoint to use."""

    _block_type_name = "Headrace Experience Store"
    _block_type_slug = "headrace-experience-store"
    _description = "Where a campaign's experience, manifests and ledger lie: a folder or any fsspec URL."

    url: str = Field(description="A folder or an fsspec URL, such as s3://bucket/prefix")
    endpoint_url: str | None = Field(default=None, description="Of an S3-compatible service; empty = AWS")
    access_key_id: SecretStr | None = Field(default=None, description="S3 access key; empty = as the machine is set up")
    secret_access_key: SecretStr | None = Field(default=None, description="S3 secret key")

    def export(self) -> None:
        """Puts endpoint and credentials into this process's environment, where s3fs and its children find them."""
        given = {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key_id and self.access_key_id.get_secret_value(),
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key and self.secret_access_key.get_secret_value(),
        }
        os.environ.update({name: value for name, value in given.items() if value})


def store_of_block(name: str) -> str:
    """The URL of a saved block, with its credentials exported. Raises ValueError when there is no such block."""
    block = cast(ExperienceStore, ExperienceStore.load(name, _sync=True))  # pyright: ignore[reportCallIssue]
    block.export()
    return block.url
