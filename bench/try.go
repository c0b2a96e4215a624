// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
)

// Exit is the end of a benchmark's program: it runs the benchmark and ends the process, with
// status 1 if a target was missed and 2 after an error.
func Exit(name string, run func() (met bool)) {
	met := false
	if err := Try(func() { met = run() }); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(2)
	}
	if !met {
		os.Exit(1)
	}
	os.Exit(0)
}

// failure carries an error from [NoError] to [Try].
type failure struct{ err error }

// Try runs a measurement or a check, which [NoError] may end early. It returns the error
// that did.
func Try(measure func()) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case failure:
			err = r.err
		default:
			panic(r)
		}
	}()
	measure()
	return nil
}

// Within runs a part of a measurement. An error that ends it is prefixed with the part's
// name.
func Within(name string, measure func()) {
	if err := Try(measure); err != nil {
		NoError(fmt.Errorf("%s: %w", name, err))
	}
}

// NoError ends the measurement if err is not nil, as t.Fatal ends a test. Deferred calls
// run. It must be called on the goroutine of [Try].
func NoError(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// Must returns v. Like [NoError] it ends the measurement if err is not nil.
func Must[T any](v T, err error) T {
	NoError(err)
	return v
}
