"""The router over real HTTP: what passes, what is tried again, what never is."""

import asyncio
import dataclasses
import json
import re
import ssl

import httpx
import orjson
import pytest
from tests.unit.cluster.routing.conftest import piece, reply, routed, start

from fornax.cluster.routing.pool import Replica, RoutingConfig
from fornax.cluster.routing.service import host_service
from fornax.config import ConfigError, load
from fornax.config.credentials import TOKEN_HEADER, Credentials
from fornax.llm.server import ServeConfig
from fornax.serving.config import HostConfig

EVENT = b'data: {"n": %d}\n\n'
LONG = "a long beginning of a prompt that fills some blocks " * 10


def run(test):
    """Run a coroutine to its end, if it has one."""

    async def bounded():
        async with asyncio.timeout(600):
            await test

    asyncio.run(bounded())


async def fine(upstream, request, send):
    if request.url.path == "/metrics":
        await reply(send, 404)
        return
    await reply(send, body=b'{"from": %d}' % upstream.number, content_type="application/json")


def refuses(status):
    async def refuse(upstream, request, send):
        await reply(send, status, b'{"no": %d}' % upstream.number, retry_after="7")

    return refuse


async def broken_server():
    """A server that closes every connection when it has a whole head, and how often it did."""
    count = []

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        count.append(1)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", count


def test_requests_and_responses_pass_unchanged(tmp_path):
    async def answer(upstream, request, send):
        await reply(
            send, 418, b"\x00\xff body", x_own="1", content_type="text/odd", x_request_id="theirs"
        )

    async def test():
        async with routed(tmp_path, answer) as router:
            headers = {"x-mine": "é".encode(), "x-request-id": "id-1", "te": "trailers"}
            body = b'{"prompt": "\\u00e9"}'
            path = "/v1/odd%2Fpath%20x?q=a%26b&q=2"
            found = await router.client.post(path, content=body, headers=headers)
            assert (found.status_code, found.content) == (418, b"\x00\xff body")
            assert found.headers["x-own"] == "1"
            assert found.headers["content-type"] == "text/odd"
            assert found.headers.get_list("x-request-id") == ["id-1"]
            assert found.headers["x-fornax-replica"] == "0"
            assert len(found.headers.get_list("date")) == 1
            [upstream] = router.upstreams
            [seen] = upstream.seen
            assert upstream.bodies == [body]
            assert seen.scope["raw_path"] == b"/v1/odd%2Fpath%20x"
            assert seen.scope["query_string"] == b"q=a%26b&q=2"
            given = dict(seen.scope["headers"])
            assert given[b"x-mine"] == "é".encode()
            assert given[b"x-request-id"] == b"id-1"
            assert given[b"x-forwarded-for"] == b"127.0.0.1"
            assert b"te" not in given

    run(test())


@pytest.mark.parametrize(
    ("target", "status"),
    [("*", 400), ("//x:1/y", 200), ("/%zz?%", 200), ("/..//.", 200), ("http://other/v1", 200)],
)
def test_odd_targets_reach_the_replica_as_paths_or_not_at_all(tmp_path, target, status):
    async def test():
        async with routed(tmp_path, fine) as router:
            url = router.client.base_url
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert len(router.upstreams[0].seen) == (status == 200)
            writer.close()

    run(test())


def test_the_head_of_a_response_without_its_body_keeps_the_length(tmp_path):
    async def test():
        async with routed(tmp_path, fine) as router:
            found = await router.client.head("/v1/models")
            assert (found.headers["content-length"], found.content) == ("11", b"")

    run(test())


def test_events_are_passed_on_as_they_come(tmp_path):
    heard = [asyncio.Event() for _ in range(3)]

    async def answer(upstream, request, send):
        await start(send)
        for number, event in enumerate(heard):
            await piece(send, EVENT % number)
            await event.wait()  # the next one comes when the client has this one
        await piece(send, b"data: [DONE]\n\n", more=False)

    async def test():
        async with (
            routed(tmp_path, answer) as router,
            router.client.stream("POST", "/v1/completions", json={"prompt": "x"}) as found,
        ):
            assert found.headers["content-type"] == "text/event-stream"
            pieces = found.aiter_raw()
            for number, event in enumerate(heard):
                assert await anext(pieces) == EVENT % number
                event.set()
            assert b"".join([rest async for rest in pieces]) == b"data: [DONE]\n\n"

    run(test())


def test_a_client_that_leaves_is_noticed_by_the_replica(tmp_path):
    async def streams(upstream, request, send):
        await start(send)
        await piece(send, EVENT % 0)
        await upstream.until_left(request)

    async def silent(upstream, request, send):
        await upstream.until_left(request)

    async def test():
        async with routed(tmp_path, streams) as router:
            stream = router.client.stream("POST", "/v1/completions", json={"prompt": "x"})
            async with stream as found:
                await anext(found.aiter_raw())
            await router.upstreams[0].left.wait()
        async with routed(tmp_path, silent) as router:
            asking = asyncio.create_task(router.complete())
            while not router.upstreams[0].seen:
                await asyncio.sleep(0.01)
            asking.cancel()
            await router.upstreams[0].left.wait()
            while router.pool.replicas[0].running:
                await asyncio.sleep(0.01)
            assert len(router.upstreams[0].seen) == 1

    run(test())


@pytest.mark.parametrize("tls", [False, True])
def test_a_replica_answers_its_router_alone(tmp_path, tls):
    known, other = Credentials.make(tls=tls), Credentials.make(tls=True)
    shown = {TOKEN_HEADER: known.token}

    async def events(upstream, request, send):
        await start(send)
        for number in range(100):
            await piece(send, EVENT % number)
        await piece(send, b"", more=False)

    async def ask(url, **options):
        async with httpx.AsyncClient(**{"timeout": 120, **options}) as client:
            return await client.get(f"{url}/v1/models")

    async def test():
        async with routed(tmp_path, events, credentials=known) as router:
            url, [upstream] = router.pool.replicas[0].url, router.upstreams
            forged = await router.client.post("/v1/x", headers={TOKEN_HEADER: "guess"})
            assert forged.content == b"".join(EVENT % number for number in range(100))
            assert upstream.seen[0].headers.getlist(TOKEN_HEADER) == [known.token]
            context = known.context(server=False) if tls else None
            for headers in ({}, {TOKEN_HEADER: "guess"}):
                refused = await ask(url, headers=headers, verify=context or True)
                assert refused.status_code == 401
                assert "the router of its launch alone" in refused.text
            if tls:
                unsigned = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                unsigned.check_hostname, unsigned.verify_mode = False, ssl.CERT_NONE
                foreign = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                foreign.check_hostname, foreign.verify_mode = False, ssl.CERT_NONE
                certificate = tmp_path / "foreign.pem"
                certificate.write_text(other.key + other.certificate)
                foreign.load_cert_chain(certificate)
                for each in (unsigned, foreign, other.context(server=False)):
                    with pytest.raises(httpx.TransportError):
                        await ask(url, headers=shown, verify=each)
                with pytest.raises(httpx.TransportError):
                    await ask(url.replace("https", "http"), headers=shown)
            assert len(upstream.seen) == 1
            assert (await ask(url, headers=shown, verify=context or True)).status_code == 200

    run(test())


def test_what_a_replica_did_not_answer_goes_to_another(tmp_path):
    async def test():
        server, url, count = await broken_server()
        gone = Replica(number=8, url="http://127.0.0.1:9", phase="ready")  # nobody listens there
        async with server, routed(tmp_path, fine) as router:
            router.pool.add(gone)
            router.pool.add(Replica(number=9, url=url, phase="ready"))
            router.pool.replicas[0].chosen = 5
            for _ in range(3):
                found = await router.complete()
                assert found.json() == {"from": 0}
            assert len(count) == 1
            assert router.pool.replicas[9].phase == gone.phase == "unready"
            metrics = (await router.client.get("/metrics")).text
            assert 'fornax_router_retries_total{reason="broken"} 1.0' in metrics

    run(test())


def test_a_request_that_ends_replicas_is_given_up(tmp_path):
    async def test():
        server, url, count = await broken_server()
        async with server, routed(tmp_path, routing=RoutingConfig(max_retries=1)) as router:
            for number in range(4):
                router.pool.add(Replica(number=number, url=url, phase="ready"))
            found = await router.complete()
            assert found.status_code == 502
            assert "2 replicas ended while they answered" in found.json()["error"]["message"]
            assert len(count) == 2

    run(test())


def test_a_stream_that_began_ends_with_an_error_and_is_not_begun_anew(tmp_path):
    async def dies(upstream, request, send):
        await start(send)
        await piece(send, EVENT % 0 + EVENT % 1 + b'data: {"n": ')
        await asyncio.sleep(0.05)
        raise ConnectionError  # uvicorn cuts the response off

    async def test():
        async with routed(tmp_path, dies, dies) as router:
            found = await router.complete(stream=True)
            assert found.status_code == 200
            *events, done, rest = found.content.split(b"\n\n")
            assert events[:2] == [b'data: {"n": 0}', b'data: {"n": 1}']
            assert (len(events), done, rest) == (3, b"data: [DONE]", b"")
            error = json.loads(events[2].removeprefix(b"data: "))["error"]
            assert re.search(r"replica \d ended while it answered", error["message"])
            assert sum(len(each.seen) for each in router.upstreams) == 1
            assert (
                "fornax_router_cut_responses_total 1.0" in router.metrics.exposition({})[0].decode()
            )

    run(test())


def test_another_response_that_began_is_cut_off(tmp_path):
    async def dies(upstream, request, send):
        await start(send, "application/octet-stream")
        await piece(send, b"x" * 1000)
        await asyncio.sleep(0.05)
        raise ConnectionError

    async def test():
        async with routed(tmp_path, dies, dies) as router:
            with pytest.raises(httpx.RemoteProtocolError):
                await router.complete()
            assert sum(len(each.seen) for each in router.upstreams) == 1

    run(test())


def test_a_whole_response_that_breaks_off_is_tried_again(tmp_path):
    async def dies(upstream, request, send):
        headers = [(b"content-length", b"10")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await piece(send, b"12345")
        await asyncio.sleep(0.05)
        raise ConnectionError

    async def test():
        async with routed(tmp_path, dies, fine) as router:
            assert (await router.complete()).json() == {"from": 1}

    run(test())


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 503])
def test_a_full_replica_passes_its_request_to_another(tmp_path, status):
    async def test():
        async with routed(tmp_path, refuses(status), fine, refuses(status)) as router:
            for _ in range(4):
                assert (await router.complete()).json() == {"from": 1}
        async with routed(tmp_path, refuses(status), refuses(status)) as router:
            found = await router.complete()
            assert found.status_code == status
            assert found.headers["retry-after"] == "7"
            assert [len(each.seen) for each in router.upstreams] == [1, 1]

    run(test())


def test_without_a_ready_replica_a_request_waits_then_gets_503(tmp_path):
    async def test():
        async with routed(tmp_path, fine) as router:
            [replica] = router.pool.replicas.values()
            router.pool.enter(replica, "starting")
            ready = await router.client.get("/ready")
            assert (ready.status_code, ready.json()["replicas"]) == (503, {"0": "starting"})
            assert (await router.client.get("/health")).status_code == 200
            asking = asyncio.create_task(router.complete())
            await asyncio.sleep(0.05)
            assert not asking.done()
            router.pool.enter(replica, "ready")
            assert (await asking).json() == {"from": 0}
            assert (await router.client.get("/ready")).status_code == 200
        async with routed(tmp_path, routing=RoutingConfig(queue_timeout=0.05)) as router:
            found = await router.complete()
            assert found.status_code == 503
            assert found.headers["retry-after"] == "1"
            assert "no replica is ready" in found.json()["error"]["message"]

    run(test())


def test_the_router_holds_tokens_and_bodies_to_the_limits_of_serve(tmp_path):
    options = {"api_key": ("secret",), "max_body_bytes": 1000, "timeout_keep_alive": 1.0}

    async def test():
        async with routed(tmp_path, fine, **options) as router:
            assert (await router.complete()).status_code == 401
            key = {"authorization": "Bearer secret"}
            large = {"prompt": "x" * 1000}
            found = await router.client.post("/v1/completions", json=large, headers=key)
            assert found.status_code == 413
            assert not router.upstreams[0].seen
            found = await router.client.post("/v1/completions", json={}, headers=key)
            assert found.status_code == 200
            assert router.upstreams[0].seen[0].headers["authorization"] == "Bearer secret"

    run(test())
    config = tmp_path / "replica.yaml"
    assert config.stat().st_mode & 0o777 == 0o600
    inner = load(ServeConfig, file=config)
    assert inner == ServeConfig(port=0, **{**options, "timeout_keep_alive": 75.0})


def test_prompts_with_one_beginning_go_to_one_replica(tmp_path):
    async def test():
        async with routed(tmp_path, fine, fine, fine) as router:
            places = [
                {(await router.complete(prompt=f"{name} {LONG} {n}")).json()["from"]}
                for name in "abc"
                for n in range(4)
            ]
            by_name = [set.union(*places[n : n + 4]) for n in (0, 4, 8)]
            assert sorted(map(len, by_name)) == [1, 1, 1]
            assert set.union(*by_name) == {0, 1, 2}
            metrics = (await router.client.get("/metrics")).text
        blocks, matched = (
            float(re.search(rf"^fornax_router_prefix_blocks{name}_total (\S+)", metrics, re.M)[1])  # pyrefly: ignore
            for name in ("", "_matched")
        )
        assert matched / blocks == 0.75  # three of four

    run(test())


def test_a_change_reaches_all_replicas_and_those_that_come_later(tmp_path):
    asked = []

    async def notes(upstream, request, send):
        asked.append((upstream.number, request.url.path))
        await reply(send)

    async def test():
        load = {"lora_name": "a", "lora_path": "p"}
        async with routed(tmp_path, notes, notes, notes) as router:
            late = router.pool.replicas[2]
            router.pool.enter(late, "starting")
            router.pool.suspect(router.pool.replicas[1])
            found = await router.client.post("/v1/load_lora_adapter", json=load)
            assert found.status_code == 200
            assert sorted(asked) == [(0, "/v1/load_lora_adapter"), (1, "/v1/load_lora_adapter")]
            asked.clear()
            await router.changes.admit(late)
            assert asked == [(2, "/v1/load_lora_adapter")]
            assert late.phase == "ready"
            router.upstreams[1].answer = refuses(400)
            found = await router.client.post("/v1/unload_lora_adapter", json=load)
            assert (found.status_code, found.json()) == (400, {"no": 1})
            asked.clear()
            await router.changes.admit(late)
            assert asked == [(2, "/v1/load_lora_adapter")]  # what failed is not made again

    run(test())


def test_the_metrics_of_all_replicas_are_shown_by_number(tmp_path):
    async def metrics(upstream, request, send):
        text = (
            "# HELP tokens_total Tokens.\n# TYPE tokens_total counter\n"
            f'tokens_total{{model="m"}} {upstream.number + 10}.0\n'
        )
        await reply(send, body=text.encode(), content_type="text/plain")

    async def test():
        async with routed(tmp_path, metrics, metrics, refuses(404)) as router:
            found = await router.client.get("/metrics")
            assert found.headers["content-type"].startswith("text/plain")
            lines = found.text.splitlines()
            assert [line for line in lines if line.startswith("tokens_total")] == [
                'tokens_total{model="m",replica="0"} 10.0',
                'tokens_total{model="m",replica="1"} 11.0',
            ]
            assert lines.count("# TYPE tokens_total counter") == 1
            assert 'fornax_router_replica_ready{replica="2"} 1.0' in lines

    run(test())


class TestHost:
    """The router of `fornax host`."""

    @pytest.fixture
    def config(self, tmp_path):
        tokens = tmp_path / "tokens"
        tokens.write_text("user\n")
        (tmp_path / "admin").write_text("boss\n")
        return HostConfig(
            repository=tmp_path,
            http=0,
            token_file=tokens,
            admin_token_file=tmp_path / "admin",
            max_body_bytes=1000,
        )

    def test_tokens_limits_and_errors_are_those_of_host(self, tmp_path, config):
        async def test():
            async with routed(tmp_path, fine, fine, host=config) as router:
                ask, path = router.client.post, "/v2/models/m/infer"
                found = await ask(path, content=b"{}")
                assert (found.status_code, set(found.json())) == (401, {"error"})
                user = {"authorization": "Bearer user"}
                found = await ask(path, content=b"x" * 2000, headers=user)
                assert (found.status_code, set(found.json())) == (413, {"error"})
                load = "/v2/repository/models/m/load"
                assert (await ask(load, headers=user)).status_code == 403
                assert not any(each.seen for each in router.upstreams)
                binary = {**user, "inference-header-content-length": "2"}
                assert (await ask(path, content=b"{}\x00", headers=binary)).status_code == 200
                assert sum(len(each.seen) for each in router.upstreams) == 1
                boss = {"authorization": "Bearer boss"}
                assert (await ask(load, headers=boss)).status_code == 200
                assert sum(len(each.seen) for each in router.upstreams) == 3
                ready = await router.client.get("/v2/health/ready")
                assert ready.json() == {"ready": True, "replicas": {"0": "ready", "1": "ready"}}

        run(test())

    def test_client_router_and_replica_know_a_request_by_one_id(self, tmp_path, config):
        async def test():
            async with routed(tmp_path, fine, host=config) as router:
                user = {"authorization": "Bearer user"}
                for given, kept in (
                    ({"x-request-id": "mine"}, True),
                    ({"x-request-id": "a b"}, False),
                ):
                    path, headers = "/v2/models/m/infer", {**user, **given}
                    found = await router.client.post(path, json={}, headers=headers)
                    [name] = found.headers.get_list("x-request-id")
                    assert (name == given["x-request-id"]) == kept
                    seen = router.upstreams[0].seen[-1].scope["headers"]
                    assert [v for n, v in seen if n == b"x-request-id"] == [name.encode()]
                refused = await router.client.post(path, json={}, headers={"x-request-id": "mine"})
                assert refused.status_code == 401
                assert refused.headers["x-request-id"] == "mine"

        run(test())

    def test_models_are_served_while_another_one_is_not_ready(self, tmp_path, config):
        config = dataclasses.replace(config, token_file=None, admin_token_file=None)

        async def test():
            async with routed(tmp_path, refuses(503), fine, host=config) as router:
                for replica in router.pool.replicas.values():
                    router.pool.enter(replica, "unready")
                    router.pool.heard(replica, True)
                assert (await router.client.get("/v2/health/ready")).status_code == 503
                found = await router.client.post("/v2/models/m/infer", json={})
                assert found.json() == {"from": 1}

        run(test())

    @pytest.mark.parametrize(("http", "memory"), [("0.0.0.0:8080", "off"), (8080, "on")])
    def test_replicas_are_local_and_trust_no_more_than_the_router(
        self, tmp_path, config, http, memory
    ):
        pair = {"tls_cert": tmp_path / "tokens", "tls_key": tmp_path / "tokens"}
        config = dataclasses.replace(config, http=http, **pair)
        service = host_service(config, tmp_path)
        words = service.words("127.0.0.1", 1234, 1235)
        assert words[-4:] == ["--http", "127.0.0.1:1234", "--grpc", "127.0.0.1:1235"]
        words = service.words("10.0.0.5", 1234, 1235)  # a node of Ray's, on a private network
        assert words[words.index("--http") + 1] == "10.0.0.5:1234"
        assert words[-3:] == ["--shared-memory", "off", "--allow-anonymous"]
        inner = load(HostConfig, file=tmp_path / "replica.yaml")
        assert (inner.tls(), inner.shared_memory) == (None, memory)
        assert inner.auth() == config.auth()
        assert (service.grpc.tls, service.grpc.auth) == (config.tls(), config.auth())
        config = dataclasses.replace(config, grpc="none")
        words = host_service(config, tmp_path).words("127.0.0.1", 1234, 1235)
        assert words[-2:] == ["--grpc", "none"]

    def test_an_open_address_without_a_token_is_refused_as_host_refuses_it(self, tmp_path):
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            host_service(HostConfig(repository=tmp_path, http="0.0.0.0:8080"), tmp_path)


def test_the_prompt_of_a_chat_routes_it(tmp_path):
    async def test():
        async with routed(tmp_path, fine, fine) as router:
            body = {"messages": [{"role": "user", "content": LONG}]}
            first = (await router.client.post("/v1/chat/completions", json=body)).json()
            body["messages"].append({"role": "assistant", "content": "yes"})
            again = await router.client.post("/v1/chat/completions", content=orjson.dumps(body))
            assert again.json() == first

    run(test())
