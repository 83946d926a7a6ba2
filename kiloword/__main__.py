from kiloword.cli.main import main

main()
