"""Creates the bucket: versioned, encrypted, never public, with roles for a trainer and a reader.

    python infra/s3/bootstrap.py BUCKET --trainer ARN --reader ARN

Uses the library's endpoint and credentials, whose account must be allowed to create buckets.
Running it again restores the settings.
"""

import argparse
import json
import string
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo.errors import GrpoError
from grpo.runtime.storage.client import USUAL, Location, Store, explained

HERE = Path(__file__).parent
ROLES = ("trainer", "reader")
DAYS_TO_RESUME = 7  # after which the parts of an unfinished upload are removed
NEVER_PUBLIC = {
    "BlockPublicAcls": True,
    "IgnorePublicAcls": True,
    "BlockPublicPolicy": True,
    "RestrictPublicBuckets": True,
}


def main() -> None:
    """Creates the bucket; a GrpoError becomes one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description="Creates the bucket of models and runs.")
    parser.add_argument("bucket")
    for role in ROLES:
        parser.add_argument(f"--{role}", required=True, metavar="ARN")
    arguments = parser.parse_args()
    names = {"BUCKET": arguments.bucket, "TRAINER": arguments.trainer, "READER": arguments.reader}
    try:
        client = Store(USUAL).client
        with explained(Location(arguments.bucket, "")):
            make_bucket(client, arguments.bucket)
            protect(client, arguments.bucket)
            policy = json.dumps(read_policy(names))
            client.put_bucket_policy(Bucket=arguments.bucket, Policy=policy)
    except GrpoError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def make_bucket(client: Any, bucket: str) -> None:
    """Creates a bucket in the client's region unless it exists."""
    region = client.meta.region_name
    place = {"CreateBucketConfiguration": {"LocationConstraint": region}}
    with suppress(client.exceptions.BucketAlreadyOwnedByYou):
        # us-east-1 is the default and must not be given as LocationConstraint.
        client.create_bucket(Bucket=bucket, **({} if region == "us-east-1" else place))


def protect(client: Any, bucket: str) -> None:
    """Blocks public access; enables versioning, encryption and removal of unfinished uploads."""
    client.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=NEVER_PUBLIC)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    encryption = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
    client.put_bucket_encryption(
        Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": [encryption]}
    )
    left = {
        "ID": "uploads that were never finished",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": DAYS_TO_RESUME},
    }
    client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [left]}
    )


def read_policy(names: dict[str, str]) -> dict[str, Any]:
    """Returns the policies of all roles merged into one, since a bucket has a single policy.

    Args:
      names: Values for BUCKET, TRAINER and READER.
    """
    texts = [(HERE / f"{role}.json").read_text() for role in ROLES]
    policies = [json.loads(string.Template(text).substitute(names)) for text in texts]
    return {
        "Version": policies[0]["Version"],
        "Statement": [each for policy in policies for each in policy["Statement"]],
    }


if __name__ == "__main__":
    main()
