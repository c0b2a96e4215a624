// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"github.com/kvroute/kvroute/bench"
)

// startBus starts a NATS server in this process, which stores in files.
func startBus() (url string, stop func() error, err error) {
	dir, err := os.MkdirTemp("", "kvroute-bench-")
	if err != nil {
		return "", nil, err
	}
	remove := func() error { return os.RemoveAll(dir) }
	s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true})
	if err != nil {
		return "", nil, errors.Join(err, remove())
	}
	go s.Start()
	stop = func() error {
		s.Shutdown()
		s.WaitForShutdown()
		return remove()
	}
	if !s.ReadyForConnections(10 * time.Second) {
		return "", nil, errors.Join(errors.New("NATS does not start"), stop())
	}
	return s.ClientURL(), stop, nil
}

// ServeBus runs a NATS server until in ends. It writes a line with its URL to out.
func ServeBus(in io.Reader, out io.Writer) error {
	url, stop, err := startBus()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, url)
	if err == nil {
		_, err = io.Copy(io.Discard, in)
	}
	return errors.Join(err, stop())
}

// busProcess is a NATS server in its own process, as a fleet has it.
type busProcess struct {
	cmd *exec.Cmd
	in  io.Closer
	url string
}

// startBusProcess starts a command that does what [ServeBus] does.
func startBusProcess(command []string) (*busProcess, error) {
	b := &busProcess{cmd: exec.Command(command[0], command[1:]...)}
	b.cmd.Stderr = os.Stderr
	in, err := b.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := b.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := b.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	b.in, b.url = in, strings.TrimSpace(line)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the NATS server's process gives no URL: %w", err), b.stop())
	}
	return b, nil
}

// cpu returns how long the cores have worked for the server.
func (b *busProcess) cpu() (time.Duration, error) { return bench.ProcessTime(b.cmd.Process.Pid) }

// stop ends the process and waits for its end.
func (b *busProcess) stop() error { return errors.Join(b.in.Close(), b.cmd.Wait()) }
