"""A simulated etcd of one member: the calls and watches that this project's client uses.

Requests, responses and errors are those of etcd's gRPC service. A method or a field of a
request that no code here uses fails the run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aetcd import rpc

from tests.simulation.loop.process import SimProcess
from tests.simulation.network.connection import End
from tests.simulation.network.grpc import CANCEL, SimChannel, rpc_error
from tests.simulation.network.network import Network
from tests.simulation.servers.etcd_data import EtcdData, EtcdLeases, in_range

PORT = 2379

_MEMBER_ID = 1

_NO_LEASE = "etcdserver: requested lease not found"
_LEASE_EXISTS = "etcdserver: lease already exists"
_FUTURE = "etcdserver: mvcc: required revision is a future revision"
_COMPACTED = "etcdserver: mvcc: required revision has been compacted"


@dataclass
class _Watch:
    """A client's watch on a range of keys."""

    end: End
    #: Of the call within the connection.
    number: int
    first: bytes
    last: bytes
    #: Changes of earlier revisions are not sent, also if they are in the future.
    from_revision: int

    def wants(self, event: Any) -> bool:
        kv = event.kv
        return kv.mod_revision >= self.from_revision and in_range(kv.key, self.first, self.last)


class EtcdServer:
    """Runs as `process` on `data` until that dies. At its start every lease gets its whole
    time-to-live again, as in etcd.

    on_expiry: see `EtcdLeases`. slowest_answer_s: calls are applied at once, and answered after
    up to this time.
    """

    def __init__(
        self,
        network: Network,
        process: SimProcess,
        data: EtcdData | None = None,
        *,
        on_expiry: Callable[[int], None] = lambda _: None,
        slowest_answer_s: float = 0.0,
    ):
        self._loop, self._process = network.loop, process
        self.data = data or EtcdData()
        self._leases = EtcdLeases(self.data, network, self._commit, on_expiry)
        self._slowest_answer_s = slowest_answer_s
        self._random = network.random
        self._watches: list[_Watch] = []
        self._methods: dict[str, Callable[[Any], Any]] = {
            "/etcdserverpb.KV/Range": self._range,
            "/etcdserverpb.KV/Put": self._put,
            "/etcdserverpb.KV/DeleteRange": self._delete_range,
            "/etcdserverpb.KV/Txn": self._txn,
            "/etcdserverpb.KV/Compact": self._compact,
            "/etcdserverpb.Lease/LeaseGrant": self._grant,
            "/etcdserverpb.Lease/LeaseRevoke": self._revoke,
            "/etcdserverpb.Lease/LeaseKeepAlive": self._keep_alive,
        }
        process.run(network.listen, process, self._accept, PORT)
        for lease_id in self.data.leases:
            process.run(self._leases.live_on, lease_id)

    def revoke(self, lease_id: int) -> bool:
        """As an operator's call, without a client. Returns whether the lease was known."""
        return self._process.run(self._leases.end, lease_id)

    def put(self, key: str, value: bytes) -> None:
        """As an operator's call, without a client."""
        self._process.run(self._put, rpc.PutRequest(key=key.encode(), value=value))

    # The connections

    def _accept(self, end: End) -> None:
        end.send("hello")
        end.start(lambda item: self._take(end, item), lambda _: self._cancel(end))

    def _take(self, end: End, item: Any) -> None:
        match item:
            case (number, "/etcdserverpb.Watch/Watch", request):
                self._watch(end, number, request.create_request)
            case (number, method, _) if method == CANCEL:
                self._cancel(end, number)
            case (number, method, request):
                answer = (number, self._answer(method, request), True)
                if self._slowest_answer_s:
                    delay_s = self._slowest_answer_s * self._random()
                    self._loop.call_later(delay_s, end.send, answer)
                else:
                    end.send(answer)

    def _cancel(self, end: End, number: int | None = None) -> None:
        """Ends the watch of a call; of all calls when the connection has ended."""
        self._watches = [
            watch
            for watch in self._watches
            if watch.end is not end or number not in (None, watch.number)
        ]

    def _answer(self, method: str, request: Any) -> Any:
        """The response, or the error."""
        try:
            return self._methods[method](request)
        except rpc.AioRpcError as error:
            return error

    # Keys

    def _range(self, request: Any) -> Any:
        assert not (request.count_only or request.limit or request.sort_target)
        if request.revision > self.data.revision:
            raise rpc_error(rpc.StatusCode.OUT_OF_RANGE, _FUTURE)
        if request.revision and request.revision < self.data.compacted:
            raise rpc_error(rpc.StatusCode.OUT_OF_RANGE, _COMPACTED)
        revision = request.revision or self.data.revision
        found = list(self.data.range(request.key, request.range_end, revision))
        if request.keys_only:
            found = [_without_value(kv) for kv in found]
        return rpc.RangeResponse(header=self._header(), kvs=found, count=len(found))

    def _put(self, request: Any) -> Any:
        return self._committed(self._apply_put(request))

    def _delete_range(self, request: Any) -> Any:
        return self._committed(self._apply_delete(request))

    def _committed(self, response: Any) -> Any:
        self._commit()
        response.header.CopyFrom(self._header())
        return response

    def _txn(self, request: Any) -> Any:
        succeeded = all(self._holds(compare) for compare in request.compare)
        steps = request.success if succeeded else request.failure
        puts = [step.request_put for step in steps]
        assert all(put.key for put in puts), "only puts are simulated"
        for put in puts:  # before the first change
            self._check_lease(put.lease)
        applied = [self._apply_put(put) for put in puts]
        self._commit()
        header = self._header()
        for response in applied:
            response.header.CopyFrom(header)
        responses = [rpc.ResponseOp(response_put=response) for response in applied]
        return rpc.TxnResponse(header=header, succeeded=succeeded, responses=responses)

    def _compact(self, request: Any) -> Any:
        self.data.compact(request.revision)
        return rpc.CompactionResponse(header=self._header())

    def _holds(self, compare: Any) -> bool:
        assert compare.result == rpc.Compare.EQUAL
        kv = self.data.keys.get(compare.key)
        target = compare.WhichOneof("target_union") or "create_revision"
        if kv is None:
            if target == "value":
                return False
            kv = rpc.KeyValue()
        return getattr(kv, target) == getattr(compare, target)

    def _apply_put(self, request: Any) -> Any:
        self._check_lease(request.lease)
        self.data.put(request.key, request.value, request.lease)
        return rpc.PutResponse()

    def _apply_delete(self, request: Any) -> Any:
        found = list(self.data.range(request.key, request.range_end, self.data.revision))
        for kv in found:
            self.data.delete(kv.key)
        return rpc.DeleteRangeResponse(deleted=len(found))

    def _check_lease(self, lease_id: int) -> None:
        if lease_id and lease_id not in self.data.leases:
            raise rpc_error(rpc.StatusCode.NOT_FOUND, _NO_LEASE)

    # Leases

    def _grant(self, request: Any) -> Any:
        if request.ID in self.data.leases:
            raise rpc_error(rpc.StatusCode.FAILED_PRECONDITION, _LEASE_EXISTS)
        lease_id, ttl_s = self._leases.grant(request.ID, request.TTL)
        return rpc.LeaseGrantResponse(header=self._header(), ID=lease_id, TTL=ttl_s)

    def _keep_alive(self, request: Any) -> Any:
        ttl_s = self._leases.keep_alive(request.ID)
        return rpc.LeaseKeepAliveResponse(header=self._header(), ID=request.ID, TTL=ttl_s)

    def _revoke(self, request: Any) -> Any:
        if not self._leases.end(request.ID):
            raise rpc_error(rpc.StatusCode.NOT_FOUND, _NO_LEASE)
        return rpc.LeaseRevokeResponse(header=self._header())

    # Watches

    def _watch(self, end: End, number: int, request: Any) -> None:
        """A revision in the future is waited for in silence, as etcd does."""
        data = self.data
        from_revision = request.start_revision or data.revision + 1
        watch = _Watch(end, number, request.key, request.range_end, from_revision)
        self._respond(watch, created=True)
        if watch.from_revision < data.compacted:
            self._respond(watch, canceled=True, compact_revision=data.compacted)
            return
        self._watches.append(watch)
        if events := data.events_since(watch.first, watch.last, watch.from_revision):
            self._respond(watch, events=events)

    def _commit(self) -> None:
        """Makes what was changed one revision, and tells it."""
        events = self.data.commit()
        if events:
            for watch in self._watches:
                if wanted := [event for event in events if watch.wants(event)]:
                    self._respond(watch, events=wanted)

    def _respond(self, watch: _Watch, **what: Any) -> None:
        response = rpc.WatchResponse(header=self._header(), **what)
        watch.end.send((watch.number, response, False))

    def _header(self) -> Any:
        return rpc.ResponseHeader(
            cluster_id=self.data.cluster,
            member_id=_MEMBER_ID,
            revision=self.data.revision,
            raft_term=1,
        )


def _without_value(kv: Any) -> Any:
    bare = rpc.KeyValue()
    bare.CopyFrom(kv)
    bare.ClearField("value")
    return bare


#: Of the simulated etcd. The network knows servers by their ports alone.
ETCD_URL = f"http://etcd:{PORT}"


def etcd_options(network: Network) -> dict[str, Any]:
    """Of the running process's store. Hosts of its URL are found by their ports."""
    return {
        "open_channel": lambda host, _: SimChannel(network, host[1]),
        "clock": network.loop.current_process().clock,
    }
