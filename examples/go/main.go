// Command ask asks an agent something, and follows the turn to its end.
package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	control "roundhouse.example/ask/gen/roundhouse/control/v1"
	engine "roundhouse.example/ask/gen/roundhouse/engine/v1"
)

// patience is how long a server that is away is waited for.
const patience = time.Minute

// reason says why a call failed: a name from docs/errors.md, which a program may switch on. Empty: the server never said.
func reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

// retryDelay says after what time the same call is worth another try, and whether it is at all.
func retryDelay(err error) (time.Duration, bool) {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			delay := info.GetRetryDelay()
			return time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos()), true
		}
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded:
		return 500 * time.Millisecond, true
	default:
		return 0, false
	}
}

// call makes a call, again and again while the server is away.
//
// Whether a call without an answer was carried out cannot be known. Its request id makes that no matter: a repeat gets
// the first one's answer.
func call(ctx context.Context, make func(context.Context) error) error {
	until := time.Now().Add(patience)
	for {
		bounded, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := make(bounded)
		cancel()
		if err == nil {
			return nil
		}
		delay, again := retryDelay(err)
		if !again || time.Now().Add(delay).After(until) {
			return err
		}
		time.Sleep(delay)
	}
}

// newRequestID makes an id for one mutation and all its repeats.
func newRequestID() string {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		panic(err) // The system has no random numbers.
	}
	return hex.EncodeToString(id)
}

// follow hands over the events of a turn to its end, each once, over as many streams as it takes.
func (c *client) follow(ctx context.Context, conversationID, turnID string, each func(*engine.EventBody) error) error {
	cursor := ""
	until := time.Now().Add(patience)
	for {
		ended, err := c.followOnce(ctx, &control.StreamEventsRequest{
			ConversationId: conversationID, TurnId: turnID, AfterCursor: cursor,
		}, func(item *control.StreamEventsResponse) error {
			cursor = item.GetCursor()
			defer func() { until = time.Now().Add(patience) }()
			if event := item.GetTurnEvent(); event != nil {
				return each(event.GetBody())
			}
			return nil
		})
		if ended {
			return err
		}
		delay := 500 * time.Millisecond
		if err != nil {
			var again bool
			delay, again = retryDelay(err)
			// One that read too slowly is as good as one whose connection broke.
			again = again || reason(err) == "SLOW_READER"
			if !again || time.Now().Add(delay).After(until) {
				return err
			}
			fmt.Fprintln(os.Stderr, "the stream broke; going on after what has come")
		}
		time.Sleep(delay)
	}
}

// followOnce reads one stream. It answers whether that was the last: after the turn's end, or because each failed.
func (c *client) followOnce(
	ctx context.Context, request *control.StreamEventsRequest, each func(*control.StreamEventsResponse) error,
) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.service.StreamEvents(ctx, request)
	if err != nil {
		return false, err
	}
	for {
		item, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if err := each(item); err != nil {
			return true, err
		}
		if item.GetTurnEvent().GetBody().GetTerminal() != nil {
			return true, nil
		}
	}
}

// client is what the program needs to talk to a control plane and to a person.
type client struct {
	service control.ConversationServiceClient
	stdin   *bufio.Reader
}

// decide puts what an engine wants to do to a person, and passes the answer on.
func (c *client) decide(ctx context.Context, request *engine.PermissionRequestEvent) error {
	title := request.GetTitle()
	if title == "" {
		title = request.GetTool()
	}
	fmt.Fprintf(os.Stderr, "%s: %s\nallow? [y/N] ", title, request.GetInputJson())
	line, err := c.stdin.ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	answer := &control.AnswerPermissionRequest{
		RequestId:           newRequestID(),
		PermissionRequestId: request.GetRequestId(),
		Decision:            engine.PermissionDecision_PERMISSION_DECISION_DENY,
		Feedback:            "The person at the terminal said no.",
	}
	if word := strings.ToLower(strings.TrimSpace(line)); word == "y" || word == "yes" {
		answer.Decision = engine.PermissionDecision_PERMISSION_DECISION_ALLOW
		answer.Feedback = ""
	}
	var answered *control.AnswerPermissionResponse
	err = call(ctx, func(ctx context.Context) (err error) {
		answered, err = c.service.AnswerPermission(ctx, answer)
		return err
	})
	if err == nil && !answered.GetAccepted() {
		fmt.Fprintln(os.Stderr, "it had been decided before")
	}
	return err
}

// options are what the program was asked for.
type options struct {
	server, conversation, workspace, agent, text string
}

// ask holds one turn and answers its outcome.
func (c *client) ask(ctx context.Context, o options) (engine.Outcome, error) {
	outcome := engine.Outcome_OUTCOME_UNSPECIFIED
	if o.conversation == "" {
		create := &control.CreateConversationRequest{RequestId: newRequestID(), Workspace: o.workspace, Agent: o.agent}
		err := call(ctx, func(ctx context.Context) error {
			made, err := c.service.CreateConversation(ctx, create)
			o.conversation = made.GetConversation().GetConversationId()
			return err
		})
		if err != nil {
			return outcome, err
		}
	}
	fmt.Println("conversation:", o.conversation)
	// An empty workspace or agent is the conversation's own.
	send := &control.SendMessageRequest{
		RequestId: newRequestID(), ConversationId: o.conversation, Text: o.text, Workspace: o.workspace, Agent: o.agent,
	}
	var sent *control.SendMessageResponse
	err := call(ctx, func(ctx context.Context) (err error) {
		sent, err = c.service.SendMessage(ctx, send)
		return err
	})
	if err != nil {
		return outcome, err
	}
	err = c.follow(ctx, o.conversation, sent.GetTurn().GetTurnId(), func(body *engine.EventBody) error {
		switch kind := body.GetKind().(type) {
		case *engine.EventBody_Session:
			if kind.Session.GetState() == engine.SessionEvent_STATE_OPENED {
				fmt.Println("origin:", strings.TrimPrefix(kind.Session.GetOrigin().String(), "ORIGIN_"))
			}
		case *engine.EventBody_Text:
			fmt.Println(kind.Text.GetText())
		case *engine.EventBody_PermissionRequest:
			return c.decide(ctx, kind.PermissionRequest)
		case *engine.EventBody_Terminal:
			outcome = kind.Terminal.GetOutcome()
			fmt.Println("outcome:", strings.TrimPrefix(outcome.String(), "OUTCOME_"))
			if failure := kind.Terminal.GetFailure(); failure != nil {
				why := strings.TrimPrefix(failure.GetReason().String(), "FAILURE_REASON_")
				fmt.Fprintf(os.Stderr, "%s: %s\n%s\n", why, failure.GetMessage(), failure.GetNextAction())
			}
		}
		return nil
	})
	return outcome, err
}

// explain prints why a call failed, with what the server says about it.
func explain(err error) {
	failed, ok := status.FromError(err)
	if !ok {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	fmt.Fprintf(os.Stderr, "%s %s: %s\n", failed.Code(), reason(err), failed.Message())
	for _, detail := range failed.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			for key, value := range detail.GetMetadata() {
				fmt.Fprintf(os.Stderr, "  %s: %s\n", key, value)
			}
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				fmt.Fprintf(os.Stderr, "  %s: %s\n", violation.GetField(), violation.GetDescription())
			}
		}
	}
}

func main() {
	var o options
	flag.StringVar(&o.server, "server", "127.0.0.1:7450", "the control plane")
	flag.StringVar(&o.conversation, "conversation", "", "go on with this one instead of a new one")
	flag.StringVar(&o.workspace, "workspace", "", "a directory, or <runner>:<path>")
	flag.StringVar(&o.agent, "agent", "", "the name of a file in the workspace's .agents")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: ask [options] TEXT")
		flag.PrintDefaults()
		os.Exit(2)
	}
	o.text = flag.Arg(0)
	// A server that comes back is looked for every two seconds.
	retry := backoff.DefaultConfig
	retry.MaxDelay = 2 * time.Second
	connection, err := grpc.Dial(o.server,
		grpc.WithInsecure(), // newer releases also call it WithTransportCredentials(insecure.NewCredentials())
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: 5 * time.Second}),
		// Without pings a dead connection looks like a quiet one.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}))
	if err != nil {
		explain(err)
		os.Exit(1)
	}
	defer connection.Close()
	c := &client{service: control.NewConversationServiceClient(connection), stdin: bufio.NewReader(os.Stdin)}
	outcome, err := c.ask(context.Background(), o)
	if err != nil {
		explain(err)
		os.Exit(1)
	}
	if outcome != engine.Outcome_OUTCOME_COMPLETED {
		os.Exit(1)
	}
}
