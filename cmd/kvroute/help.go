// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/internal/settings"
)

// helpError is the error of a command that was run with -h. It has the command's flags.
type helpError struct{ flags *flag.FlagSet }

func (helpError) Error() string { return "help wanted" }

// printCommands lists the commands.
func printCommands(w io.Writer) {
	fmt.Fprint(w, "usage: kvroute COMMAND [flags]\n")
	for _, c := range commands() {
		if c.topic != "" {
			fmt.Fprintf(w, "\n%s\n", c.topic)
		}
		fmt.Fprintf(w, "  %-14s %s\n", c.name, c.does)
	}
	fmt.Fprint(w, "\n`kvroute help COMMAND` lists a command's flags. An exit status of 0 means success, 1 a failure, 2 a mistake in the\n"+
		"command line, and 130 that a signal ended the command early.\n")
}

// printHelp lists the flags of a command: those of the router's settings by topic, in the order of
// the configuration.
func (c *command) printHelp(w io.Writer, fs *flag.FlagSet) {
	name, meaning, _ := strings.Cut(c.argument, "  ")
	usage := strings.TrimSpace("kvroute " + c.name + " [flags] " + name)
	fmt.Fprintf(w, "usage: %s\n\n%s%s.\n\n", usage, strings.ToUpper(c.does[:1]), c.does[1:])
	if meaning != "" {
		fmt.Fprintf(w, "  %s\n        %s\n", name, meaning)
	}
	own := defaults()
	topics := fs.Lookup("router-mode") != nil
	ofTopics := maps.Collect(settings.All(&own))
	fs.VisitAll(func(f *flag.Flag) {
		if _, has := ofTopics[f.Name]; !has || !topics {
			printFlag(w, f)
		}
	})
	for name, s := range settings.All(&own) {
		f := fs.Lookup(name)
		if !topics || f == nil {
			continue
		}
		if topic := s.Tag.Get("topic"); topic != "" {
			fmt.Fprintf(w, "\n%s\n", topic)
		}
		printFlag(w, f)
	}
	fmt.Fprintf(w, "\nEach flag can also be an environment variable: %s and so on. A flag wins over its variable.\n",
		variable("log-level"))
}

func printFlag(w io.Writer, f *flag.Flag) {
	kind, text := flag.UnquoteUsage(f)
	if !slices.Contains([]string{"", "0", "0s", "false"}, f.DefValue) {
		text += " (default " + f.DefValue + ")"
	}
	fmt.Fprintf(w, "  --%s\n        %s\n", strings.TrimSpace(f.Name+" "+kind), text)
}

// variable returns the name of the environment variable of a flag.
func variable(flag string) string {
	return "KVROUTE_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// fromEnvironment sets the flags whose environment variables are set. NVIDIA Dynamo's variables
// count where they have the same meaning; one that begins with ! has the opposite one.
func fromEnvironment(fs *flag.FlagSet) (err error) {
	own := defaults()
	dynamos := maps.Collect(settings.All(&own))
	fs.VisitAll(func(f *flag.Flag) {
		for _, name := range []string{dynamos[f.Name].Tag.Get("dynamo"), variable(f.Name)} {
			name, not := strings.CutPrefix(name, "!")
			value := os.Getenv(name)
			if strings.HasPrefix(name, "DYN_") { // as Dynamo reads them
				value = cmp.Or(map[string]string{
					"yes": "true", "on": "true", "no": "false", "off": "false",
				}[strings.ToLower(value)], value)
			}
			if b, bad := strconv.ParseBool(value); not && bad == nil {
				value = strconv.FormatBool(!b)
			}
			if value == "" || err != nil {
				continue
			}
			if bad := fs.Set(f.Name, value); bad != nil {
				err = usageError(fmt.Sprintf("environment variable %s is %q, want %s", name, value, wantedOf(f)))
			}
		}
	})
	return err
}

var (
	unknownFlag = regexp.MustCompile(`^flag provided but not defined: -+(.*)$`)
	badValue    = regexp.MustCompile(`^invalid (?:boolean )?value "(.*)" for (?:flag )?-+([a-z0-9-]+): (?:parse error|value out of range|strconv.*)$`)
)

// wrongFlag says what is wrong with a flag, in this package's words.
func wrongFlag(fs *flag.FlagSet, err error) error {
	if unknown := unknownFlag.FindStringSubmatch(err.Error()); unknown != nil {
		var names []string
		fs.VisitAll(func(f *flag.Flag) { names = append(names, "--"+f.Name) })
		return usageError(fmt.Sprintf("there is no flag --%s%s", unknown[1], didYouMean("--"+unknown[1], names)))
	}
	if bad := badValue.FindStringSubmatch(err.Error()); bad != nil {
		return usageError(fmt.Sprintf("--%s is %q, want %s", bad[2], bad[1], wantedOf(fs.Lookup(bad[2]))))
	}
	return usageError(strings.NewReplacer("flag -", "flag --", "argument: -", "argument: --").Replace(err.Error()))
}

// beginning is the setting that an error is about, after the name of a package. A Go name is that of a flag, too.
var beginning = regexp.MustCompile(`^(?:[a-z]+: )?([A-Za-z][A-Za-z0-9-]*) `)

// asTyped names settings in the lines of an error as the user gave them: a flag of args with its dashes, a variable
// of the environment in capital letters. A setting of a file has the file's name in front, and stays.
func asTyped(text string, args []string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		found := beginning.FindStringSubmatch(line)
		if found == nil {
			continue
		}
		name := strings.ToLower(strings.Join(words.FindAllString(found[1], -1), "-"))
		typed := slices.ContainsFunc(args, func(arg string) bool {
			flag, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
			return flag == name && strings.HasPrefix(arg, "-")
		})
		switch {
		case typed:
			name = "--" + name
		case os.Getenv(variable(name)) != "":
			name = variable(name)
		default:
			continue
		}
		lines[i] = name + " " + line[len(found[0]):]
	}
	return strings.Join(lines, "\n")
}

// words finds the words of a setting's name.
var words = regexp.MustCompile(`[A-Z]?[a-z0-9]+|[A-Z]+`)

// wantedOf names the values that a flag accepts.
func wantedOf(f *flag.Flag) string {
	if value, ok := f.Value.(flag.Getter); ok {
		return wanted(reflect.TypeOf(value.Get()))
	}
	return "a number"
}

// didYouMean returns a question with the name that is most like a wrong one, or "" if none is.
func didYouMean(wrong string, names []string) string {
	best, most := "", 0.5
	for _, name := range names {
		if l := likeness(wrong, name); l > most {
			best, most = name, l
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(", did you mean %q?", best)
}

// likeness returns the share of pairs of neighbouring letters that two words have in common, 0 to 1
// (the Dice coefficient).
func likeness(a, b string) float64 {
	common := 0
	for i := range len(a) - 1 {
		if strings.Contains(b, a[i:i+2]) {
			common++
		}
	}
	return 2 * float64(common) / float64(max(1, len(a)+len(b)-2))
}

// commandsWith returns the names of the commands that begin with a text.
func commandsWith(with string) (names []string) {
	for _, c := range commands() {
		if strings.HasPrefix(c.name, with) {
			names = append(names, c.name)
		}
	}
	return names
}

// printValues prints the words that a flag accepts, one a line. It prints nothing for a flag of another kind. args are
// a command and its flag.
func printValues(ctx context.Context, args []string, out io.Writer) error {
	cmd, _ := find(args)
	if cmd == nil {
		return nil
	}
	var help helpError
	if !errors.As(cmd.run(ctx, []string{"-h"}, stdio{io.Discard, io.Discard}), &help) {
		return nil
	}
	f := help.flags.Lookup(strings.TrimLeft(args[len(args)-1], "-"))
	if f == nil {
		return nil
	}
	for _, word := range enumOf(f.Usage) {
		fmt.Fprintln(out, word)
	}
	return nil
}

var (
	oneWord  = regexp.MustCompile(`^[a-z0-9_.-]+$`)
	orBefore = regexp.MustCompile(`, | or `)
)

// enumOf returns the words that a help text begins with, as in "auto, on or off: …"; nil if it begins otherwise.
func enumOf(help string) []string {
	if end := strings.IndexAny(help, ":;("); end >= 0 {
		help = help[:end]
	}
	words := orBefore.Split(strings.TrimSpace(help), -1)
	if len(words) < 2 || slices.ContainsFunc(words, func(w string) bool { return !oneWord.MatchString(w) }) {
		return nil
	}
	return words
}

//go:embed completion
var shells embed.FS

// completion prints the completion of a shell. It learns commands and flags from `kvroute help`, and the values of
// flags from `kvroute completion values COMMAND --FLAG`.
func completion(ctx context.Context, args []string, std stdio) error {
	if len(args) > 1 && args[0] == "values" {
		return printValues(ctx, args[1:], std.out)
	}
	rest, err := parseArgs(newFlagSet("completion"), args)
	if err != nil {
		return err
	}
	script, err := shells.ReadFile("completion/" + strings.Join(rest, " "))
	if err != nil {
		return usageError("want one of bash, zsh or fish")
	}
	_, err = std.out.Write(script)
	return err
}
