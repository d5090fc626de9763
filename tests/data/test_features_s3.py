"""The features store on S3, by HTTP: `pip install s3fs "moto[s3,server]"` has it run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fsspec.config import conf

from data import features_remote as remote
from data.features import write_features
from data.features_remote import RemoteFolder
from data.file_cache import FileCache
from tests.data.test_features import FILES, PLAN, TRACES, answer, batch_of
from trainer.errors import RunFault

pytest.importorskip("s3fs")
boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")


@pytest.fixture
def storage(monkeypatch):
    """A client of a server with one bucket, `states`."""
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setitem(conf, "s3", {"endpoint_url": address})  # FSSPEC_S3_ENDPOINT_URL
    client = boto3.client("s3", endpoint_url=address)
    client.create_bucket(Bucket="states")
    yield client
    server.stop()


def place(folder, root="s3://states/of/heads") -> RemoteFolder:
    return RemoteFolder(root, folder / "features" / "digest", FileCache(folder / "cache", 1e9))


def test_states_are_written_and_read(storage, tiny_target, tmp_path):
    target = tiny_target("llama")
    whole = write_features(target, TRACES, PLAN, tmp_path / "whole", batch_size=2)
    write_features(target, TRACES, PLAN, place(tmp_path / "a"), batch_size=2)
    there = {one["Key"] for one in storage.list_objects_v2(Bucket="states")["Contents"]}
    assert there == {f"of/heads/digest/{name}" for name in (*FILES, "manifest.json")}
    reader = write_features(target, TRACES, PLAN, place(tmp_path / "b"), batch_size=2)
    for i in np.random.default_rng(0).permutation(len(TRACES)):
        batch = batch_of(TRACES[i], TRACES[0])
        found, wanted = answer(reader, batch).hidden, answer(whole, batch).hidden
        assert all(torch.equal(found[name], states) for name, states in wanted.items())


def test_a_cut_shard_is_made_again(storage, tiny_target, tmp_path):
    target = tiny_target("llama")
    write_features(target, TRACES, PLAN, place(tmp_path), batch_size=2)
    key = f"of/heads/digest/{FILES[1]}"
    content = storage.get_object(Bucket="states", Key=key)["Body"].read()
    storage.put_object(Bucket="states", Key=key, Body=content[:-1])
    storage.delete_object(Bucket="states", Key="of/heads/digest/manifest.json")
    write_features(target, TRACES, PLAN, place(tmp_path), batch_size=2)
    assert storage.get_object(Bucket="states", Key=key)["Body"].read() == content


def test_a_bucket_that_is_not_there_is_not_made(storage, tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "DELAYS_S", (0.0,))
    with pytest.raises(
        RunFault, match=r"cannot write s3://sates/of/digest .*bucket does not exist"
    ):
        write_features(
            tiny_target("llama"), TRACES, PLAN, place(tmp_path, "s3://sates/of"), batch_size=2
        )
    assert [one["Name"] for one in storage.list_buckets()["Buckets"]] == ["states"]
