// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// engineTable is the file with the table of engines.
const engineTable = "internal/engine/engine.go"

// otherWords are the files that may contain a string that equals the name of an engine but means
// something else, with the reason.
var otherWords = map[string]string{
	"cmd/kvroute/help.go":   "dynamo is the key of a struct tag",
	"cmd/kvroute/status.go": "Dynamo is a source of workers",
	"events/select.go":      "dynamo is a transport of events",
	"fleet/record.go":       "dynamo is a transport of events",
	"scorer/settings.go":    "dynamo is a cost",
}

// engineNames are the files that may use the names of package engine, with the reason.
var engineNames = map[string]string{
	"attention/advice.go":       "advice for an unknown engine is that for vLLM",
	"engines/discover.go":       "the form of an answer tells the engine",
	"engines/sockets.go":        "the transport http_poll tells the engine",
	"fleet/dynamo.go":           "the records are Dynamo's",
	"tokenizer/chat/request.go": "the rules of a chat are those of an engine",
}

// namesOfEngines returns the names and spellings in the table of engines, and the constants of the names.
func namesOfEngines(table *ast.File) (names, constants []string) {
	text := func(e ast.Expr) {
		if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if s, err := strconv.Unquote(lit.Value); err == nil {
				names = append(names, s)
			}
		}
	}
	ast.Inspect(table, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ValueSpec:
			before := len(names)
			for _, v := range n.Values {
				text(v)
			}
			if len(names) > before {
				constants = append(constants, n.Names[0].Name)
			}
		case *ast.KeyValueExpr:
			key, _ := n.Key.(*ast.Ident)
			list, isList := n.Value.(*ast.CompositeLit)
			switch {
			case key == nil:
			case key.Name == "Name":
				text(n.Value)
			case key.Name == "Spellings" && isList:
				for _, e := range list.Elts {
					text(e)
				}
			}
		}
		return true
	})
	return names, constants
}

// namedEngines returns the places of a file that name an engine: as a string, and by a constant of
// package engine.
func namedEngines(fset *token.FileSet, file *ast.File, names, constants []string) (words, uses []string) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BasicLit:
			s, err := strconv.Unquote(n.Value)
			if n.Kind == token.STRING && err == nil && slices.Contains(names, strings.ToLower(s)) {
				words = append(words, fmt.Sprintf("%s: %q", fset.Position(n.Pos()), s))
			}
		case *ast.SelectorExpr:
			from, ok := n.X.(*ast.Ident)
			if ok && from.Name == "engine" && slices.Contains(constants, n.Sel.Name) {
				uses = append(uses, fmt.Sprintf("%s: engine.%s", fset.Position(n.Pos()), n.Sel.Name))
			}
		}
		return true
	})
	return words, uses
}

// Only the table knows what an engine is: other packages ask it, so a new engine is a new row.
func TestEnginesAreOneTable(t *testing.T) {
	fset := token.NewFileSet()
	parse := func(name string) *ast.File {
		text, err := fs.ReadFile(files(t), name)
		if err != nil {
			t.Fatal(err)
		}
		file, err := parser.ParseFile(fset, name, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	names, constants := namesOfEngines(parse(engineTable))
	if !slices.Contains(names, "tensorrt-llm") || !slices.Contains(constants, "VLLM") {
		t.Fatalf("the table of engines has the names %q and the constants %q", names, constants)
	}
	needless := map[string]bool{}
	for file := range otherWords {
		needless[file] = true
	}
	for file := range engineNames {
		needless[file] = true
	}
	err := fs.WalkDir(files(t), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && name != "." && strings.HasPrefix(d.Name(), ".") {
			return fs.SkipDir
		}
		_, inProduct := tokenLimits[path.Dir(name)]
		if !inProduct || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || name == engineTable {
			return nil
		}
		words, uses := namedEngines(fset, parse(name), names, constants)
		if len(words)+len(uses) > 0 {
			delete(needless, name)
		}
		if otherWords[name] == "" {
			for _, w := range words {
				t.Errorf("%s is the name of an engine: ask a field of the table in %s", w, engineTable)
			}
		}
		if engineNames[name] == "" {
			for _, u := range uses {
				t.Errorf("%s names an engine: ask a field of the table in %s", u, engineTable)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for file := range needless {
		t.Errorf("%s names no engine: remove it from the list of exceptions", file)
	}
}

func TestEngineRulesCanFail(t *testing.T) {
	const text = "package p\n\n" +
		"var a, b, c = \"VLLM\", \"vllm-like\", `new`\n\n" +
		"func f(s string) bool { return s == engine.New || s == engine.Of(s).Name || other.New == s }\n"
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "p.go", text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	words, uses := namedEngines(fset, file, []string{"vllm", "new"}, []string{"New"})
	if fmt.Sprint(words) != `[p.go:3:15: "VLLM" p.go:3:36: "new"]` || fmt.Sprint(uses) != "[p.go:5:37: engine.New]" {
		t.Errorf("got the words %v and the uses %v", words, uses)
	}
}
