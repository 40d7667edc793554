#!/usr/bin/env python3
"""Asks an agent something, and follows the turn to its end."""

import argparse
import sys
import time
import uuid
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

sys.path.insert(0, str(Path(__file__).parent / "gen"))  # what ./generate made

from roundhouse.control.v1 import conversation_pb2 as pb  # noqa: E402
from roundhouse.control.v1 import conversation_pb2_grpc as rpc  # noqa: E402
from roundhouse.engine.v1 import event_pb2 as ev  # noqa: E402

# Seconds without any success after which a server that is away is given up.
PATIENCE = 60.0


def detail(error, kind):
    """The detail of this kind that came with an error, such as google.rpc.ErrorInfo. None: there is none."""
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        found = kind()
        if packed.Unpack(found):
            return found
    return None


def reason(error):
    """Why a call failed: a name from docs/errors.md, which a program may switch on. Empty: the server never said."""
    info = detail(error, error_details_pb2.ErrorInfo)
    return info.reason if info else ""


def retry_delay(error):
    """Seconds after which the same call is worth another try. None: it is not."""
    retry = detail(error, error_details_pb2.RetryInfo)
    if retry:
        return retry.retry_delay.ToTimedelta().total_seconds()
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return 0.5
    return None


def call(method, request):
    """Makes a call, again and again while the server is away.

    Whether a call without an answer was carried out cannot be known. Its request id makes that no matter: a repeat
    gets the first one's answer.
    """
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return method(request, timeout=10)
        except grpc.RpcError as error:
            delay = retry_delay(error)
            if delay is None or time.monotonic() + delay > until:
                raise
            time.sleep(delay)


def follow(service, conversation_id, turn_id):
    """Yields the events of a turn to its end, each once, over as many streams as it takes."""
    cursor = ""
    until = time.monotonic() + PATIENCE
    while True:
        request = pb.StreamEventsRequest(
            conversation_id=conversation_id, turn_id=turn_id, after_cursor=cursor)
        delay = 0.5
        try:
            for item in service.StreamEvents(request):
                cursor = item.cursor
                if item.HasField("turn_event"):
                    yield item.turn_event.body
                    if item.turn_event.body.HasField("terminal"):
                        return
                until = time.monotonic() + PATIENCE
        except grpc.RpcError as error:
            # One that read too slowly is as good as one whose connection broke.
            delay = 0.0 if reason(error) == "SLOW_READER" else retry_delay(error)
            if delay is None or time.monotonic() + delay > until:
                raise
            print("the stream broke; going on after what has come", file=sys.stderr)
        time.sleep(delay)


def decide(service, request):
    """Puts what an engine wants to do to a person, and passes the answer on."""
    print(f"{request.title or request.tool}: {request.input_json}", file=sys.stderr)
    print("allow? [y/N] ", end="", file=sys.stderr, flush=True)
    allowed = sys.stdin.readline().strip().lower() in ("y", "yes")
    answer = call(service.AnswerPermission, pb.AnswerPermissionRequest(
        request_id=uuid.uuid4().hex,
        permission_request_id=request.request_id,
        decision=ev.PERMISSION_DECISION_ALLOW if allowed else ev.PERMISSION_DECISION_DENY,
        feedback="" if allowed else "The person at the terminal said no."))
    if not answer.accepted:
        print("it had been decided before", file=sys.stderr)


def ask(service, options):
    """Holds one turn. Answers its outcome."""
    conversation_id = options.conversation
    if not conversation_id:
        made = call(service.CreateConversation, pb.CreateConversationRequest(
            request_id=uuid.uuid4().hex, workspace=options.workspace, agent=options.agent))
        conversation_id = made.conversation.conversation_id
    print(f"conversation: {conversation_id}")
    # An empty workspace or agent is the conversation's own.
    sent = call(service.SendMessage, pb.SendMessageRequest(
        request_id=uuid.uuid4().hex, conversation_id=conversation_id, text=options.text,
        workspace=options.workspace, agent=options.agent))
    for body in follow(service, conversation_id, sent.turn.turn_id):
        kind = body.WhichOneof("kind")
        if kind == "session" and body.session.state == ev.SessionEvent.STATE_OPENED:
            print("origin:", ev.Origin.Name(body.session.origin).removeprefix("ORIGIN_"))
        elif kind == "text":
            print(body.text.text)
        elif kind == "permission_request":
            decide(service, body.permission_request)
        elif kind == "terminal":
            end = body.terminal
            print("outcome:", ev.Outcome.Name(end.outcome).removeprefix("OUTCOME_"))
            if end.HasField("failure"):
                why = ev.FailureReason.Name(end.failure.reason).removeprefix("FAILURE_REASON_")
                print(f"{why}: {end.failure.message}\n{end.failure.next_action}", file=sys.stderr)
            return end.outcome
    raise AssertionError("a turn has an end")


def explain(error):
    """Prints why a call failed, with what the server says about it."""
    print(f"{error.code().name} {reason(error)}: {error.details()}", file=sys.stderr)
    info = detail(error, error_details_pb2.ErrorInfo)
    for key, value in info.metadata.items() if info else ():
        print(f"  {key}: {value}", file=sys.stderr)
    bad = detail(error, error_details_pb2.BadRequest)
    for violation in bad.field_violations if bad else ():
        print(f"  {violation.field}: {violation.description}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:7450", help="the control plane")
    parser.add_argument("--conversation", default="", help="go on with this one instead of a new one")
    parser.add_argument("--workspace", default="", help="a directory, or <runner>:<path>")
    parser.add_argument("--agent", default="", help="the name of a file in the workspace's .agents")
    parser.add_argument("text", help="what to ask")
    options = parser.parse_args()
    # Without pings a dead connection looks like a quiet one. A server that comes back is looked for every two seconds.
    settings = {"grpc.keepalive_time_ms": 10_000, "grpc.keepalive_timeout_ms": 10_000,
                "grpc.http2.max_pings_without_data": 0, "grpc.max_reconnect_backoff_ms": 2_000}
    with grpc.insecure_channel(options.server, options=list(settings.items())) as channel:
        try:
            outcome = ask(rpc.ConversationServiceStub(channel), options)
        except grpc.RpcError as error:
            explain(error)
            return 1
    return 0 if outcome == ev.OUTCOME_COMPLETED else 1


if __name__ == "__main__":
    sys.exit(main())
