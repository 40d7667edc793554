"""A stack in a Docker engine, as compose/test sees it: from outside, by docker, Compose, grpcurl and HTTP."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONTROL = "roundhouse.control.v1"
ENGINE = "roundhouse.engine.v1"


def check(holds, what, *facts):
    """Fails with these words and facts unless it holds. (assert would be gone under -O.)"""
    if not holds:
        raise AssertionError(" ".join([what, *(f"\n  {fact}" for fact in facts)]))


def run(*command, bound=120, **more):
    """What a command prints. It has to succeed, and within `bound` seconds."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=bound, **more)
    check(done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}:", done.stdout, done.stderr)
    return done.stdout.strip()


def wait(what, look, bound=60.0):
    """What `look` finds, as soon as it finds something."""
    until = time.monotonic() + bound
    while True:
        found = look()
        if found:
            return found
        check(time.monotonic() < until, f"{what}: did not happen within {bound:.0f} s; last seen: {found}")
        time.sleep(0.1)


def free_port():
    """A port of loopback that nobody has now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def objects(text):
    """The JSON values that stand one after the other in a text, and where the last whole one ends."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while True:
        rest = len(text) - len(text[at:].lstrip())
        if rest == len(text):
            return found, rest
        try:
            value, at = decoder.raw_decode(text, rest)
        except ValueError:
            return found, at
        found.append(value)


class Stack:
    """One Compose project of its own name, with its own ports, volumes and image."""

    def __init__(self, image):
        compose = shutil.which("docker-compose")
        self._compose = [compose] if compose else ["docker", "compose"]
        self.name = f"roundhouse-test-{os.getpid()}"
        self._ports = {name: free_port() for name in ("control-plane", "runner-1", "runner-2", "models")}
        self._env = dict(
            os.environ,
            COMPOSE_PROJECT_NAME=self.name,
            STACK_IMAGE=image,
            STACK_PORT=str(self._ports["control-plane"]),
            STACK_RUNNER_1_PORT=str(self._ports["runner-1"]),
            STACK_RUNNER_2_PORT=str(self._ports["runner-2"]),
            STACK_MODELS_PORT=str(self._ports["models"]),
        )
        tools = os.environ.get("ROUNDHOUSE_TEST_TOOLS") or ROOT / "target/test-tools/bin"
        self._grpcurl = str(pathlib.Path(tools) / "grpcurl")

    def compose(self, *arguments, bound=120):
        """Runs Compose on the project."""
        file = ROOT / "compose/docker-compose.yml"
        return run(*self._compose, "--file", file, *arguments, bound=bound, env=self._env)

    def container(self, service):
        """The container of a service, running or not."""
        label = f"label=com.docker.compose.service={service}"
        return run("docker", "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={self.name}",
                   "--filter", label)

    def inspect(self, service):
        """What Docker knows of the container of a service."""
        return json.loads(run("docker", "inspect", self.container(service)))[0]

    def logs(self, service):
        """What a service has logged."""
        done = subprocess.run(["docker", "logs", self.container(service)], capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def shell(self, service, script):
        """Exit code and output of a shell script in a container."""
        done = subprocess.run(["docker", "exec", self.container(service), "sh", "-c", script],
                              capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.strip()

    def wait_healthy(self, *services, bound=90):
        """Waits until Docker's own health checks find these services healthy."""
        for service in services:
            wait(f"{service} is healthy", lambda: self.inspect(service)["State"]["Health"]["Status"] == "healthy", bound)

    def wait_online(self, bound=60):
        """Waits until both runners are online, and answers them by the names of their hosts."""
        def look():
            try:
                runners = self.control("RunnerService/ListRunners")["runners"]
            except (AssertionError, KeyError):
                return None
            online = {one["hostname"]: one for one in runners if one.get("state") == "STATE_ONLINE"}
            return online if len(online) == 2 else None
        return wait("both runners are online", look, bound)

    def _call(self, port, method, body):
        return [self._grpcurl, "-plaintext", "-max-time", "120", "-d", json.dumps(body), f"127.0.0.1:{port}", method]

    def control(self, method, **body):
        """Calls a method of the control plane, such as ConversationService/GetTurn."""
        return json.loads(run(*self._call(self._ports["control-plane"], f"{CONTROL}.{method}", body)))

    def describe(self, port):
        """What the runner at a port says of itself; nothing while none is there."""
        try:
            return json.loads(run(*self._call(port, f"{ENGINE}.EngineRunnerService/DescribeRunner", {})))
        except AssertionError:
            return None

    @contextlib.contextmanager
    def alone(self, *command, options):
        """A container of the image beside the stack, with these security options. Gives the port of its 7460."""
        port = free_port()
        security = [word for option in options for word in ("--security-opt", option)]
        container = run("docker", "run", "--detach", "--init", "--cap-drop", "ALL", *security,
                        "--publish", f"127.0.0.1:{port}:7460", self._env["STACK_IMAGE"], *command)
        try:
            yield port
        finally:
            run("docker", "rm", "--force", container)

    def stream(self, **body):
        """A running grpcurl that follows events."""
        command = self._call(self._ports["control-plane"], f"{CONTROL}.ConversationService/StreamEvents", body)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def models(self, path, body=None, post=False):
        """Asks the scripted models' own surface."""
        url = f"http://127.0.0.1:{self._ports['models']}/{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json"},
                                         method="POST" if post or data else "GET")
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or "null")

    def script(self, text, script):
        """From now on the model does this in turns whose message has this text."""
        self.models("__rules", {"contains": text, "script": script})

    def asked(self, text):
        """The requests that the engines made for the turn with this text, oldest first."""
        found = self.models(f"__requests?text={urllib.parse.quote(text)}")["requests"]
        return [one for one in found if one["kind"] == "main"]

    def wait_gate(self, name):
        """Waits until a model's answer stands at this gate."""
        check(self.models(f"__gates/{name}?timeout_ms=60000")["reached"] >= 1, f"nobody came to the gate {name}")

    def release(self, name):
        """Lets the answer at this gate go on."""
        self.models(f"__gates/{name}/release", post=True)

    def send(self, conversation, text, **more):
        """Sends a message; answers the id of its turn."""
        sent = self.control("ConversationService/SendMessage", conversation_id=conversation, text=text, **more)
        return sent["turn"]["turnId"]

    def turn(self, turn_id):
        """A turn with its messages, its status without the prefix."""
        got = self.control("ConversationService/GetTurn", turn_id=turn_id)
        got["status"] = got["turn"]["status"].removeprefix("TURN_STATUS_")
        got["origin"] = got["turn"].get("origin", "").removeprefix("ORIGIN_")
        got["text"] = got.get("answer", {}).get("text", "")
        return got


class Follower(threading.Thread):
    """Follows one turn to its terminal event as a client does: when the stream breaks, on from the last cursor."""

    def __init__(self, stack, conversation, turn):
        super().__init__(daemon=True)
        self._stack, self._conversation, self._turn = stack, conversation, turn
        self.events, self.cursors, self.partial, self.broken, self.connections = [], [], "", [], 0
        self.start()

    def run(self):
        while not self.terminals():
            self.connections += 1
            with self._stack.stream(conversation_id=self._conversation, turn_id=self._turn, include_partial=True,
                                    after_cursor=self.cursors[-1] if self.cursors else "") as grpcurl:
                text = ""
                for line in grpcurl.stdout:
                    text += line
                    found, end = objects(text) if line.startswith("}") else ([], 0)
                    text = text[end:]
                    for item in found:
                        self._take(item)
            time.sleep(0.2)

    def _take(self, item):
        if "partial" in item:
            self.partial += item["partial"].get("partial", {}).get("text", "")
        if not item.get("cursor"):
            return
        if item["cursor"] in self.cursors:
            self.broken.append(f"the cursor {item['cursor']} twice")
        self.cursors.append(item["cursor"])
        event = item.get("turnEvent")
        if event and event["turnId"] == self._turn:
            if int(event["seq"]) != len(self.events) + 1:
                self.broken.append(f"event {event['seq']} after {len(self.events)}")
            self.events.append(event["body"])

    def terminals(self):
        """The terminal events that came."""
        return [body["terminal"] for body in self.events if "terminal" in body]

    def ended(self, bound=90):
        """Waits for the turn's end; the stream must have been whole. Answers the turn."""
        self.join(bound)
        check(not self.is_alive(), f"{self._turn} did not end within {bound} s", self._stack.turn(self._turn), self.events)
        check(len(self.terminals()) == 1 and not self.broken, "the stream is not whole:", self.broken, self.events)
        return self._stack.turn(self._turn)
