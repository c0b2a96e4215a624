// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"io"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// errEnded is the cause of the end of a stream's context.
var errEnded = errors.New("the stream has ended")

// receive starts a goroutine that receives the messages of g, one at a time, so that the end of g
// ends ctx even during a decision. The caller must call cancel. The goroutine ends with ctx, or
// when the handler of g returns: Recv then returns an error.
func receive(g extprocv3.ExternalProcessor_ProcessServer) (ctx context.Context, cancel context.CancelCauseFunc, messages <-chan *extprocv3.ProcessingRequest) {
	ctx, cancel = context.WithCancelCause(g.Context())
	in := make(chan *extprocv3.ProcessingRequest)
	go func() {
		for {
			req, err := g.Recv()
			if err != nil {
				if errors.Is(err, io.EOF) {
					err = errEnded
				}
				cancel(err)
				return
			}
			select {
			case in <- req:
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, cancel, in
}
