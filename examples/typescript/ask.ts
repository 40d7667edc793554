// Asks an agent something, and follows the turn to its end.

import { randomUUID } from "node:crypto";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";

import { type CallOptions, type Client, Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { ConversationService } from "./gen/roundhouse/control/v1/conversation_pb.js";
import {
  type EventBody,
  FailureReason,
  Origin,
  Outcome,
  PermissionDecision,
  type PermissionRequestEvent,
  SessionEvent_State,
} from "./gen/roundhouse/engine/v1/event_pb.js";

type Service = Client<typeof ConversationService>;

/** Milliseconds without any success after which a server that is away is given up. */
const PATIENCE = 60_000;

/** Why a call failed: a name from docs/errors.md, which a program may switch on. Empty: the server never said. */
function reason(error: ConnectError): string {
  return error.findDetails(ErrorInfoSchema)[0]?.reason ?? "";
}

/** Milliseconds after which the same call is worth another try. Undefined: it is not. */
function retryDelay(error: ConnectError): number | undefined {
  const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
  if (delay) {
    return Number(delay.seconds) * 1000 + delay.nanos / 1e6;
  }
  switch (error.code) {
    case Code.Unavailable:
    case Code.DeadlineExceeded:
    // What this library makes of a connection that breaks under a call; others say Unavailable.
    case Code.Aborted:
    case Code.Canceled:
      return 500;
    default:
      return undefined;
  }
}

/**
 * Makes a call, again and again while the server is away.
 *
 * Whether a call without an answer was carried out cannot be known. Its request id makes that no matter: a repeat gets
 * the first one's answer.
 */
async function call<Answer>(once: (options: CallOptions) => Promise<Answer>): Promise<Answer> {
  const until = Date.now() + PATIENCE;
  for (;;) {
    try {
      return await once({ timeoutMs: 10_000 });
    } catch (thrown) {
      const error = ConnectError.from(thrown);
      const delay = retryDelay(error);
      if (delay === undefined || Date.now() + delay > until) {
        throw error;
      }
      await sleep(delay);
    }
  }
}

/** The events of a turn to its end, each once, over as many streams as it takes. */
async function* follow(service: Service, conversationId: string, turnId: string): AsyncGenerator<EventBody> {
  let afterCursor = "";
  let until = Date.now() + PATIENCE;
  for (;;) {
    let delay: number | undefined = 500;
    try {
      for await (const { cursor, item } of service.streamEvents({ conversationId, turnId, afterCursor })) {
        afterCursor = cursor;
        if (item.case === "turnEvent" && item.value.body) {
          yield item.value.body;
          if (item.value.body.kind.case === "terminal") {
            return;
          }
        }
        until = Date.now() + PATIENCE;
      }
    } catch (thrown) {
      const error = ConnectError.from(thrown);
      // One that read too slowly is as good as one whose connection broke.
      delay = reason(error) === "SLOW_READER" ? 0 : retryDelay(error);
      if (delay === undefined || Date.now() + delay > until) {
        throw error;
      }
      console.error("the stream broke; going on after what has come");
    }
    await sleep(delay);
  }
}

/** Reads lines that a person types. */
async function* typed(): AsyncGenerator<string> {
  yield* createInterface({ input: process.stdin });
}

/** Puts what an engine wants to do to a person, and passes the answer on. */
async function decide(service: Service, request: PermissionRequestEvent, lines: AsyncGenerator<string>): Promise<void> {
  process.stderr.write(`${request.title || request.tool}: ${request.inputJson}\nallow? [y/N] `);
  const { value: line = "" } = await lines.next();
  const allowed = /^\s*y(es)?\s*$/i.test(line);
  const answer = {
    requestId: randomUUID(),
    permissionRequestId: request.requestId,
    decision: allowed ? PermissionDecision.ALLOW : PermissionDecision.DENY,
    feedback: allowed ? "" : "The person at the terminal said no.",
  };
  const { accepted } = await call((options) => service.answerPermission(answer, options));
  if (!accepted) {
    console.error("it had been decided before");
  }
}

/** What the program was asked for. */
interface Options {
  conversation: string;
  workspace: string;
  agent: string;
  text: string;
}

/** Holds one turn. Answers its outcome. */
async function ask(service: Service, { conversation, workspace, agent, text }: Options): Promise<Outcome> {
  let conversationId = conversation;
  if (!conversationId) {
    const create = { requestId: randomUUID(), workspace, agent };
    const made = await call((options) => service.createConversation(create, options));
    conversationId = made.conversation?.conversationId ?? "";
  }
  console.log(`conversation: ${conversationId}`);
  // An empty workspace or agent is the conversation's own.
  const send = { requestId: randomUUID(), conversationId, text, workspace, agent };
  const sent = await call((options) => service.sendMessage(send, options));
  const lines = typed();
  for await (const { kind } of follow(service, conversationId, sent.turn?.turnId ?? "")) {
    switch (kind.case) {
      case "session":
        if (kind.value.state === SessionEvent_State.OPENED) {
          console.log(`origin: ${Origin[kind.value.origin]}`);
        }
        break;
      case "text":
        console.log(kind.value.text);
        break;
      case "permissionRequest":
        await decide(service, kind.value, lines);
        break;
      case "terminal": {
        const { outcome, failure } = kind.value;
        console.log(`outcome: ${Outcome[outcome]}`);
        if (failure) {
          console.error(`${FailureReason[failure.reason]}: ${failure.message}\n${failure.nextAction}`);
        }
        return outcome;
      }
    }
  }
  throw new Error("a turn has an end");
}

/** Prints why a call failed, with what the server says about it. */
function explain(error: ConnectError): void {
  console.error(`${Code[error.code]} ${reason(error)}: ${error.rawMessage}`);
  for (const info of error.findDetails(ErrorInfoSchema)) {
    for (const [key, value] of Object.entries(info.metadata)) {
      console.error(`  ${key}: ${value}`);
    }
  }
  for (const bad of error.findDetails(BadRequestSchema)) {
    for (const violation of bad.fieldViolations) {
      console.error(`  ${violation.field}: ${violation.description}`);
    }
  }
}

async function main(): Promise<number> {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      server: { type: "string", default: "127.0.0.1:7450" },
      conversation: { type: "string", default: "" },
      workspace: { type: "string", default: "" },
      agent: { type: "string", default: "" },
    },
  });
  const [text] = positionals;
  if (text === undefined || positionals.length > 1) {
    console.error("usage: ask [--server ADDRESS] [--conversation ID] [--workspace PATH] [--agent NAME] TEXT");
    return 2;
  }
  // Without pings a dead connection looks like a quiet one.
  const baseUrl = `http://${values.server}`;
  const sessionManager = new Http2SessionManager(baseUrl, { pingIntervalMs: 10_000, pingTimeoutMs: 10_000 });
  try {
    const service = createClient(ConversationService, createGrpcTransport({ baseUrl, sessionManager }));
    const { conversation, workspace, agent } = values;
    return (await ask(service, { conversation, workspace, agent, text })) === Outcome.COMPLETED ? 0 : 1;
  } catch (error) {
    if (!(error instanceof ConnectError)) {
      throw error;
    }
    explain(error);
    return 1;
  } finally {
    sessionManager.abort();
    process.stdin.destroy();
  }
}

process.exitCode = await main();
