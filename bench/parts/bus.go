// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/process"
)

// ServeBus runs a NATS server until in ends. It answers each line of in with the server's
// URL, as JSON.
func ServeBus(in io.Reader, out io.Writer) {
	s := bench.Must(bus.StartServer("127.0.0.1:0", "", ""))
	defer s.Stop()
	for lines := bufio.NewScanner(in); lines.Scan(); {
		bench.Must(fmt.Fprintf(out, "%q\n", s.URL()))
	}
}

// busProcess is a NATS server in its own process, as a fleet has it.
type busProcess struct {
	*process.Lines
	url string
}

// startBusProcess starts a command that does what [ServeBus] does.
func startBusProcess(command []string) *busProcess {
	b := &busProcess{Lines: bench.Must(process.StartLines(exec.Command(command[0], command[1:]...)))}
	bench.NoError(b.Ask("", &b.url))
	return b
}

// cpu returns how long the cores have worked for the server.
func (b *busProcess) cpu() time.Duration { return bench.Must(bench.ProcessTime(b.Pid())) }
