"""boto3 and s3fs, unmodified, read the bucket of ``ckptstore serve``."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs
import torch
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from safetensors.torch import load
from servekit import Server, served, tiny_llama

import ckptstore

_TOKEN = "correct-horse-battery"  # noqa: S105 - of this test


def _client(url: str, secret: str = "any", **config: Any) -> Any:  # noqa: ANN401, S107 - of boto3
    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="ckptstore",
        aws_secret_access_key=secret,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}, **config),
    )


def test_listings(server: Server) -> None:
    """Runs and refs are folders; every ref can be listed; pages continue."""
    client = _client(server.url)
    assert [one["Name"] for one in client.list_buckets()["Buckets"]] == ["store"]
    assert client.get_bucket_location(Bucket="store")["LocationConstraint"] is None

    def below(prefix: str) -> list[str]:
        found = client.list_objects_v2(Bucket="store", Prefix=prefix, Delimiter="/")
        return [one["Prefix"].removeprefix(prefix) for one in found.get("CommonPrefixes", [])]

    assert {"gpt/", "lora/", "lr=1e-4/"} <= set(below(""))
    assert {"1/", "2/", "latest/", "best:val_loss/", "good/"} == set(below("gpt/"))
    hidden = client.list_objects_v2(Bucket="store", Prefix="gpt/~1/")["Contents"]
    assert "gpt/~1/config.json" in [one["Key"] for one in hidden]

    whole = client.list_objects_v2(Bucket="store", Prefix="gpt/")["Contents"]
    keys = [one["Key"] for one in whole]
    assert keys == sorted(keys)
    assert {"gpt/good/one/config.json", "gpt/2/config.json"} <= set(keys)
    for version in ("list_objects_v2", "list_objects"):
        pages = client.get_paginator(version).paginate(
            Bucket="store", Prefix="gpt/", PaginationConfig={"PageSize": 7}
        )
        assert [one["Key"] for page in pages for one in page["Contents"]] == keys


def test_objects_and_ranges(server: Server, tmp_path: Path) -> None:
    """boto3 downloads a file in parts, and any range; HEAD tells size and ETag."""
    client = _client(server.url)
    key = next(
        one["Key"]
        for one in client.list_objects_v2(Bucket="store", Prefix="big/1/")["Contents"]
        if one["Key"].endswith(".safetensors")
    )
    head = client.head_object(Bucket="store", Key=key)
    client.download_file("store", key, str(tmp_path / "big"))
    data = (tmp_path / "big").read_bytes()
    assert head["ContentLength"] == len(data)
    part = client.get_object(Bucket="store", Key=key, Range="bytes=9000000-9000009")
    assert part["Body"].read() == data[9000000:9000010]
    assert part["ETag"] == head["ETag"]
    with pytest.raises(ClientError, match=r"412|PreconditionFailed"):
        client.get_object(Bucket="store", Key=key, IfMatch='"other"')
    assert _client(server.url, signature_version=UNSIGNED).head_object(Bucket="store", Key=key)


def test_s3fs_reads_weights(server: Server) -> None:
    """s3fs lists and reads; the tensors are those that were saved."""
    system = s3fs.S3FileSystem(anon=True, endpoint_url=server.url, skip_instance_cache=True)
    names = system.ls("store/gpt/best:val_loss")
    found: dict[str, torch.Tensor] = {}
    for name in names:
        if name.endswith(".safetensors"):
            found |= load(system.cat_file(name))
    expected = tiny_llama().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda c: c.put_object(Bucket="store", Key="gpt/x", Body=b"x"), "AccessDenied"),
        (lambda c: c.delete_object(Bucket="store", Key="gpt/1/config.json"), "AccessDenied"),
        (lambda c: c.get_object(Bucket="store", Key="gpt/1/absent"), "NoSuchKey"),
        (lambda c: c.get_object(Bucket="store", Key="../store.json"), "NoSuchKey"),
        (lambda c: c.list_objects_v2(Bucket="other"), "NoSuchBucket"),
    ],
    ids=["put", "delete", "missing", "outside", "bucket"],
)
def test_errors_are_those_of_s3(server: Server, call: Any, code: str) -> None:  # noqa: ANN401
    """Writing is denied, and what is missing is said so, in the words of S3."""
    with pytest.raises(ClientError) as failure:
        call(_client(server.url))
    assert failure.value.response["Error"]["Code"] == code


def test_a_target_in_absolute_form_is_its_path(server: Server) -> None:
    """Clients that name the server in the request's line, as Run:ai's streamer, get the object."""
    line = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    line.request("GET", f"{server.url}/store/gpt/1/config.json", headers={"x-amz-date": "now"})
    answer = line.getresponse()
    assert answer.status == 200
    assert answer.read() == server.get("/store/gpt/1/config.json", x_amz_date="now")[2]
    line.close()


def test_a_content_network_is_no_client(server: Server) -> None:
    """CloudFront marks what it passes on; requests of the Hub's protocol stay those."""
    assert server.get("/api/models/gpt", x_amz_cf_id="some")[2].startswith(b'{"id":"gpt"')


def test_with_a_token_requests_are_signed_with_it(place: Path, tmp_path: Path) -> None:
    """The token is the secret key: right signatures pass, others do not."""
    given = {"CKPTSTORE_SERVE_TOKEN": _TOKEN}
    with served(str(place), tmp_path, environment=given) as server:
        client = _client(server.url, _TOKEN)
        for run in ("gpt", "lr=1e-4/a"):  # names that are quoted in the signature
            listed = client.list_objects_v2(Bucket="store", Prefix=f"{run}/latest/")
            key = listed["Contents"][0]["Key"]
            assert client.get_object(Bucket="store", Key=key, Range="bytes=0-3")["Body"].read()
        for wrong in (
            _client(server.url, "wrong"),
            _client(server.url, signature_version=UNSIGNED),
        ):
            with pytest.raises(ClientError, match=r"403|SignatureDoesNotMatch"):
                wrong.head_object(Bucket="store", Key=key)
        old = {"x-amz-date": "20200101T000000Z", "Authorization": "AWS4-HMAC-SHA256 Credential=a/"}
        assert server.get("/store", **old)[0] == 403


def test_a_version_without_weights_is_not_listed(place: Path, server: Server) -> None:
    """Other versions are listed all the same."""
    with ckptstore.open(place) as store:
        store.run("numbers").save({"step": 1}, step=1)
    listed = _client(server.url).list_objects_v2(Bucket="store", Prefix="numbers/")
    assert listed["KeyCount"] == 0
    assert server.get("/numbers/resolve/main/config.json")[0] in {404, 422}


def test_names_that_begin_with_other_names(tmp_path: Path) -> None:
    """Where a tag or run is a prefix of another, each key is listed once, in order, and read."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        for name, step in (("nest", 1), ("nest/1", 7), ("nest/1/7", 2)):
            run = store.run(name)
            run.save({"model": {"w": torch.tensor([float(step)])}}, step=step)
            run.tag(step, "v1")
            run.save({"model": {"w": torch.tensor([step + 1.0])}}, step=step + 1)
            run.tag(step + 1, "v1/ema")
    with served(str(tmp_path / "store"), tmp_path) as server:
        client = _client(server.url)

        def listed(prefix: str, delimiter: str = "", size: int = 1000) -> list[str]:
            paginator = client.get_paginator("list_objects_v2")
            asked = {"Bucket": "store", "Prefix": prefix, "Delimiter": delimiter}
            found = []
            for page in paginator.paginate(**asked, PaginationConfig={"PageSize": size}):
                keys = [one["Key"] for one in page.get("Contents", [])]
                folders = [one["Prefix"] for one in page.get("CommonPrefixes", [])]
                found += sorted(keys + folders)
            return found

        keys = listed("nest")
        assert keys == sorted(set(keys))
        values = {"nest/v1": 1.0, "nest/v1/ema": 2.0, "nest/1/7": 7.0, "nest/1/7/2": 2.0}
        assert {f"{folder}/model.safetensors" for folder in values} <= set(keys)
        for key in keys:
            data = client.get_object(Bucket="store", Key=key)["Body"].read()
            folder, _, file = key.rpartition("/")
            if folder in values and file == "model.safetensors":
                assert load(data)["w"][0] == values[folder]
        assert [listed("nest", size=size) for size in (2, 3, 7)] == [keys] * 3
        ends = {key[: at + 1 + more] for key in keys for at in range(len(key)) for more in (0, 1)
                if key[at] == "/"}  # fmt: skip
        for prefix in sorted(ends):
            below = [key for key in keys if key.startswith(prefix)]
            assert listed(prefix) == below
            cuts = [key.find("/", len(prefix)) + 1 or len(key) for key in below]
            folders = sorted({key[:cut] for key, cut in zip(below, cuts, strict=True)})
            assert listed(prefix, "/") == listed(prefix, "/", size=2) == folders
